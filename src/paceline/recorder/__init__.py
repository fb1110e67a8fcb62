"""What each rank does, written where it can be read after the rank was killed."""
