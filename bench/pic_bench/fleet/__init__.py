"""Several servers behind SGLang's gateway, with its own policies and with `sglang-pic route`."""
