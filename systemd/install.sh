#!/bin/sh
# Puts the units and the configuration in their places, or takes them away: `make install-system`,
# `make uninstall-system`.  With DESTDIR it only stages files, for packagers; without, it also
# makes the user and the folders, and has systemd read the units.
set -eu

here=$(dirname "$0")
: "${DESTDIR=}" "${PREFIX=/opt/kvpair}" "${BINDIR=/usr/local/bin}"
: "${UNITLIB=/usr/local/lib}" "${SYSCONFDIR=/etc}"
units="prefilld.service decoded.service prefilld.socket kvpair.target kvpair-devices.service"
unit_folder=$DESTDIR$UNITLIB/systemd/system

# Whether there is a system to be told: not while staging, not in a chroot.
is_live() { [ -z "$DESTDIR" ] && [ -d /run/systemd/system ]; }

# Copy a file; its paths follow PREFIX and SYSCONFDIR.
place() { # SOURCE TARGET
	mkdir -p "$(dirname "$2")"
	sed "s|/opt/kvpair|$PREFIX|g; s|/etc/kvpair|$SYSCONFDIR/kvpair|g" "$1" >"$2"
	chmod 0644 "$2"
}

install_system() {
	for unit in $units; do place "$here/$unit" "$unit_folder/$unit"; done
	place "$here/kvpair.sysusers" "$DESTDIR$UNITLIB/sysusers.d/kvpair.conf"
	place "$here/kvpair.tmpfiles" "$DESTDIR$UNITLIB/tmpfiles.d/kvpair.conf"
	place "$here/../README.md" "$DESTDIR$PREFIX/share/doc/kvpair/README.md"
	for name in kvpair.toml kvpair.env; do
		target=$DESTDIR$SYSCONFDIR/kvpair/$name
		[ -e "$target" ] || place "$here/$name" "$target" # else it is the administrator's by now
	done
	mkdir -p "$DESTDIR$BINDIR"
	ln -sfn "$PREFIX/bin/kvpair" "$DESTDIR$BINDIR/kvpair"
	[ -z "$DESTDIR" ] || return 0
	systemd-sysusers "$UNITLIB/sysusers.d/kvpair.conf"
	systemd-tmpfiles --create "$UNITLIB/tmpfiles.d/kvpair.conf"
	if is_live; then systemctl daemon-reload; fi
	cat <<-END
		Installed under $PREFIX.  Next:
		  usermod -aG kvpair NAME                 who may use the model
		  $SYSCONFDIR/kvpair/kvpair.toml                 which model, and everything else
		  runuser -u kvpair -- env XDG_CACHE_HOME=/var/cache kvpair model fetch smollm2-135m-instruct
		  systemctl enable --now kvpair.target
	END
}

uninstall_system() {
	if is_live; then
		systemctl disable --now kvpair.target $units 2>/dev/null || true
	fi
	for unit in $units; do rm -f "$unit_folder/$unit"; done
	rm -f "$DESTDIR$UNITLIB/sysusers.d/kvpair.conf" "$DESTDIR$UNITLIB/tmpfiles.d/kvpair.conf"
	if [ "$(readlink "$DESTDIR$BINDIR/kvpair" || true)" = "$PREFIX/bin/kvpair" ]; then
		rm -f "$DESTDIR$BINDIR/kvpair"
	fi
	# Only what is an environment of ours goes away as a whole.
	if [ -f "$DESTDIR$PREFIX/pyvenv.cfg" ]; then rm -rf "$DESTDIR${PREFIX:?}"; fi
	if is_live; then systemctl daemon-reload; fi
	echo "Removed.  Kept: $SYSCONFDIR/kvpair, /var/cache/kvpair, the user kvpair."
}

case "${1-}" in
install) install_system ;;
uninstall) uninstall_system ;;
*)
	echo "usage: $0 install|uninstall" >&2
	exit 2
	;;
esac
