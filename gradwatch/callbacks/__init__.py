"""Ride along in the trainers of other libraries, as one of their callbacks."""
