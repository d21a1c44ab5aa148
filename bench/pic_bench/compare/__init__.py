"""Stock SGLang against the patched server on the same trace."""
