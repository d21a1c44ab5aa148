"""Shows on one HTML page what broke the prefix of recorded calls, and what position-independent reuse would recover."""
