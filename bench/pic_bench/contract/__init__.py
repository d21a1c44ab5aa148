"""For a port of the plugin to another version of SGLang: its differences, and the digests of the tested functions."""
