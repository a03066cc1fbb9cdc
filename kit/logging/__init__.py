"""What a run says about itself: rows, loggers, files."""
