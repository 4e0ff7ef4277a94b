"""Messages between the rooms, and out of them: requests, plans, reports, statistics, errors."""
