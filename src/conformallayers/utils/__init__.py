"""Text, files, progress: helpers without a view of networks."""
