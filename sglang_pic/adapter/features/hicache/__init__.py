"""Rows that HiCache keeps on the host, and text that other servers put into its store."""
