"""Search services of the web behind the Retriever protocol; one adapter a service."""
