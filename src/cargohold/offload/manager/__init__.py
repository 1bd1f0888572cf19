"""Managers: which chunks a tier holds, and where."""
