"""Node configurations, prices, GPU facts and model shapes: small dated tables and their loader."""
