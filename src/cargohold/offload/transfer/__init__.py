"""Workers' copies between paged KV and a tier."""
