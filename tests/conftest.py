"""What every test process needs."""

import signal
import threading

# A shell starts background jobs with SIGINT ignored, and children inherit that; tests send it to theirs.
if threading.current_thread() is threading.main_thread():
    signal.signal(signal.SIGINT, signal.default_int_handler)
