"""Lightning Attention."""
