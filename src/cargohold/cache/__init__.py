"""Which chunks a tier holds: the table of its chunks, and policies that decide which of them stay."""
