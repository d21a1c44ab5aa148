"""What the benchmarks of kernels and prefills share: they need no SGLang, and run on a GPU and on a CPU."""
