"""For whoever ports the plugin to another version of SGLang: what it lacks, and the digests of what was tested."""
