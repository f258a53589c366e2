"""A process for the extraction of texts that is slow to start."""

import time

from search_r1.online.extraction import main

if __name__ == "__main__":
    time.sleep(1.2)
    main()
