"""Training of targets and drafters: the modules that are trained are the modules that draft."""
