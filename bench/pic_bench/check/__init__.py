"""A running server's answers from cached prompts, beside its answers from cold ones."""
