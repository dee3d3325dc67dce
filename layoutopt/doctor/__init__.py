"""``layoutopt doctor``: what goes wrong on real machines, found before it does, with how to mend it.

Each check is a small function that returns findings. Nothing here loads an OpenCL driver: whatever a driver is asked,
a process of its own asks (``layoutopt/doctor/child.py``, ``kernels/selftest.py``), so that one that crashes or hangs is
a finding and not the end.
"""
