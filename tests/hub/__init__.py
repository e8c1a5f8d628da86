"""Small checkpoints in published layouts, and the numbers that other programs computed of them."""
