"""The engine: a plan says what is cut, and these steps cut, guard and substitute it in a single-device model."""
