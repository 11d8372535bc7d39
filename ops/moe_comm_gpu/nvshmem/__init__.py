"""The exchange on GPUs with NVSHMEM: the host side and the backend's row."""
