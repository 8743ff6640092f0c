"""Plans of trees of specs, whose launches are coalesced."""
