"""simulator: explains a plan by driving its address streams through a cache hierarchy."""
