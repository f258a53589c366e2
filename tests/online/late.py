"""A reader of pages that takes its time to start."""

import time

from search_r1.online.extraction import main

if __name__ == "__main__":
    time.sleep(1.2)
    main()
