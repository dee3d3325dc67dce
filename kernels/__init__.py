"""kernels: what runs. Variants and access descriptions (pure Python), OpenCL bodies, the runtime and the oracle."""
