"""What a rank holds: naming it, capturing it, sending it, putting it back.

Nothing here is pickled, and nothing imports more of tmover than `tmover.errors`.
"""
