"""Knowledge distillation in a run: the teacher, and the objective that reads it."""
