"""The companion: one page that shows on released records the spliced spans, and the loss."""
