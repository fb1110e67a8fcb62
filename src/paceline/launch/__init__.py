"""``paceline launch``: starts one process per rank, watches them, says what went wrong."""
