"""What a server would say when it starts, from the same tables and from SGLang's own arguments, before anyone waits."""
