"""`tmover demo`: a planned move and the loss of rank 0, beside what a restart costs."""
