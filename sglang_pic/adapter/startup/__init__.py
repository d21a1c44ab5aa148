"""What the server measures and checks on the live model before its first request."""
