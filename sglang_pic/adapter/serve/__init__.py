"""One request on its way through the server, from its options to the publication of what it computed."""
