"""int8: scales calibrated on images, and recipes rewritten in integers."""
