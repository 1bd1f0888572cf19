"""Workers in other processes: one process per rank, or one Ray actor; and which executor is made."""
