"""Code that runs inside the sandbox. It imports only the standard library and itself, because the rest of roll is not
mounted there.
"""
