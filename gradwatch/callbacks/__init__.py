"""Watch the trainers of other libraries through their callbacks."""
