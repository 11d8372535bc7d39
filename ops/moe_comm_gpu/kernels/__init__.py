"""The four kernels of the exchange and the layout of the memory they work in."""
