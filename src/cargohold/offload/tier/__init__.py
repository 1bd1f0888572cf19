"""Media that hold chunks."""
