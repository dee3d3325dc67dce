"""costmodel: predicts what a kernel costs on a device, from microbenchmarks of that device."""
