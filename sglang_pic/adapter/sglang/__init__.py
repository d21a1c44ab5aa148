"""What is used of SGLang, what of it is wrapped, and which servers are supported."""
