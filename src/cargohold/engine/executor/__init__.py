"""How steps reach workers: in process, or over several."""
