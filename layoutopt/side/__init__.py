"""Side-tuning: a device runs a frozen backbone forward only, a server trains a side network on its activations."""
