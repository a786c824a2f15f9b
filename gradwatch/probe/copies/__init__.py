"""Follow copies of watched models that the loop uses and that no optimizer moves: targets, averages, teachers."""
