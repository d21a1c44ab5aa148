"""The companion: one page that shows on released records what is spliced, and what is given up for it."""
