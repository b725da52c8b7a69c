"""Host and device side by side, and the device's matrix products by name.

In: a profile. Out: a `DeviceView`, or None without a device.
"""

from __future__ import annotations

from dataclasses import replace

from torchweld.pages.page_records import DeviceView
from torchweld.profiles.accounting.device_products import host_times, products_of
from torchweld.profiles.profile import Profile
from torchweld.report.host_beside_device import cores_words, short_name


def device_of(profile: Profile) -> DeviceView | None:
    device = profile.device
    if device is None:
        return None
    products = products_of(device)
    return DeviceView(
        name=device.name,
        host=host_times(profile, device),
        launches=device.launches,
        occupancy_queries=device.occupancy_queries,
        kernels=sum(count for count, _ in device.by_category.values()),
        launched_us=device.launched_us,
        compute_us=device.compute_us,
        non_compute_us=device.non_compute_us,
        idle_us=device.idle_us,
        products=tuple(replace(row, name=short_name(row.name)) for row in products),
        cores=cores_words(products) if products else "",
    )
