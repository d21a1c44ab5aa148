"""Several servers behind SGLang's gateway, with its own policies and steered by `sglang-pic route`."""
