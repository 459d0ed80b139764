// How cuda_sm90a's clusters divide forward's tiles among them.
#include "templates/sm90/vocabulary_walk.cuh"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <map>
#include <utility>
#include <vector>

namespace flce {
namespace {

struct Visit {
    int row_cluster;
    int tile;
};

VocabularyWalk walk_of(int cluster, int clusters, int row_clusters, int tiles) {
    return {cluster, clusters, row_clusters, spreading_stride(clusters), VocabularyWalk::stride_of_rest(clusters, tiles), tiles};
}

std::vector<Visit> visits_of(int cluster, int clusters, int row_clusters, int tiles) {
    std::vector<Visit> visits;
    for (VocabularyWalk walk = walk_of(cluster, clusters, row_clusters, tiles); walk.next(tiles);)
        visits.push_back({walk.row_cluster_of(walk.part), walk.tile});
    return visits;
}

TEST(VocabularyWalk, AnyShare_HasEveryTileOnce) {
    for (int clusters : {1, 2, 3, 16, 57, 66, 132}) {
        for (int row_clusters : {1, 2, 3, 4, 7, 15, 32, 65, 66}) {
            if (row_clusters > clusters) continue;
            for (int tiles : {1, 2, 65, 132, 133, 501}) {
                std::map<std::pair<int, int>, int> times;
                for (int cluster = 0; cluster < clusters; ++cluster) {
                    int before = 0;
                    for (const Visit& visit : visits_of(cluster, clusters, row_clusters, tiles)) {
                        ++times[{visit.row_cluster, visit.tile}];
                        EXPECT_GE(visit.tile, before) << "clusters that share rows go through the vocabulary together";
                        before = visit.tile;
                    }
                }
                EXPECT_EQ(std::ssize(times), static_cast<std::ptrdiff_t>(row_clusters) * tiles);
                for (const auto& [what, count] : times) {
                    EXPECT_EQ(count, 1) << what.first << ' ' << what.second;
                    EXPECT_LT(what.first, row_clusters);
                }
            }
        }
    }
}

// A launch takes as long as the cluster with most tiles.
TEST(VocabularyWalk, EveryShare_HasAsManyTilesButOne) {
    for (int clusters : {1, 2, 16, 57, 66, 132}) {
        for (int row_clusters : {1, 2, 5, 9, 10, 13, 16, 33, 66}) {
            if (row_clusters > clusters) continue;
            for (int tiles : {1, 40, 84, 99, 132, 167, 198, 501, 668}) {
                const int even = row_clusters * tiles / clusters;
                const int most = (row_clusters * tiles + clusters - 1) / clusters;
                for (int cluster = 0; cluster < clusters; ++cluster) {
                    const auto count = static_cast<int>(visits_of(cluster, clusters, row_clusters, tiles).size());
                    EXPECT_TRUE(even <= count && count <= most) << count << ", not " << even << ": cluster " << cluster << " of "
                                                                << clusters << ", " << row_clusters << " x " << tiles;
                }
            }
        }
    }
}

// Clusters that share rows work at the same part of the vocabulary, also in the last round.
TEST(VocabularyWalk, EveryShare_IsSpreadOverTheVocabulary) {
    constexpr int kMostTilesOff = 4;  // tiles by which a share may differ
    for (int clusters : {57, 66, 132}) {
        for (int row_clusters : {2, 5, 9, 13, 16, 33}) {
            for (int tiles : {84, 99, 167, 501}) {
                for (int cluster = 0; cluster < clusters; ++cluster) {
                    int number = 0;
                    for (const Visit& visit : visits_of(cluster, clusters, row_clusters, tiles)) {
                        const int expected = number++ * clusters / row_clusters;
                        EXPECT_LE(std::abs(visit.tile - expected), kMostTilesOff * clusters / row_clusters)
                            << "cluster " << cluster << " of " << clusters << ", " << row_clusters << " x " << tiles;
                    }
                }
            }
        }
    }
}

// A share's stretches are told apart by the tile that each of them begins with.
TEST(VocabularyWalk, EveryStretch_HasATileOfEveryShare) {
    for (int clusters : {2, 57, 66}) {
        for (int row_clusters : {1, 2, 13, 33, 57}) {
            if (row_clusters > clusters) continue;
            for (int tiles : {1, 40, 99, 167, 501}) {
                if (row_clusters * tiles < clusters) continue;
                const VocabularyWalk any = walk_of(0, clusters, row_clusters, tiles);
                const int stretches = any.stretches();
                EXPECT_EQ(any.begin_of(0, stretches), 0);
                EXPECT_EQ(any.begin_of(stretches, stretches), tiles);
                for (int cluster = 0; cluster < clusters; ++cluster) {
                    std::vector<int> found(static_cast<std::size_t>(stretches));
                    for (const Visit& visit : visits_of(cluster, clusters, row_clusters, tiles)) {
                        for (int s = 0; s < stretches; ++s) {
                            found[static_cast<std::size_t>(s)] +=
                                any.begin_of(s, stretches) <= visit.tile && visit.tile < any.begin_of(s + 1, stretches) ? 1 : 0;
                        }
                    }
                    EXPECT_EQ(std::ranges::count(found, 0), 0) << cluster << " of " << clusters << ", " << row_clusters << " x " << tiles;
                }
            }
        }
    }
}

// Where there are fewer tiles than clusters, each has its own.
TEST(VocabularyWalk, FewTiles_HaveAClusterEach) {
    for (int row_clusters : {1, 2, 5}) {
        for (int tiles : {1, 2, 7}) {
            std::map<std::pair<int, int>, int> times;
            for (int cluster = 0; cluster < row_clusters * tiles; ++cluster) {
                const std::vector<Visit> visits = visits_of(cluster, row_clusters * tiles, row_clusters, tiles);
                ASSERT_EQ(visits.size(), 1U) << cluster;
                ++times[{visits[0].row_cluster, visits[0].tile}];
            }
            EXPECT_EQ(std::ssize(times), static_cast<std::ptrdiff_t>(row_clusters) * tiles);
        }
    }
}

// The next tile is `clusters` further on.
TEST(VocabularyWalk, OneClusterOfRows_DealsTilesOutInOrder) {
    for (int cluster : {0, 1, 131}) {
        VocabularyWalk walk = walk_of(cluster, 132, 1, 501);
        EXPECT_FALSE(walk.has_second());
        int expected = cluster;
        for (; walk.next(501); expected += 132) {
            EXPECT_EQ(walk.tile, expected);
            EXPECT_EQ(walk.part, 0);
        }
        EXPECT_GE(expected, 501);
    }
}

}  // namespace
}  // namespace flce
