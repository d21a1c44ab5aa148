"""Rows that HiCache keeps on the host, and the keys of rows in its store."""
