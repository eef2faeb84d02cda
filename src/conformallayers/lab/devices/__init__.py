"""Exported networks on an emulated microcontroller: accuracy, flash, RAM and instructions."""
