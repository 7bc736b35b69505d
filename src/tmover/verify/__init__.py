"""`tmover verify`: the same script undisturbed and with faults, compared bit by bit."""
